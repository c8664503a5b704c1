"""One stage at work, and this rank's stages."""
