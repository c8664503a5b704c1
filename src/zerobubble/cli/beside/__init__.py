"""What verbs time beside passes: a head, gathers, copies to the host, and work in idle windows."""
