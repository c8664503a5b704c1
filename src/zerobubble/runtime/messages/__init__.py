"""What travels between ranks: lanes and rings, the mailbox of a step, the words that open one, and meetings between steps."""
