"""What a process shows and writes about an error: `text` makes it safe, `user_code` finds the user's frames, `uncaught` shows the last one.

`error_file` writes the file from which torchrun's last lines are made. Nothing here imports torch, so reports work before it is loaded.
"""
