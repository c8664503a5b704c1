"""Times that vary: how far a plan suffers, and orders that suffer less."""
