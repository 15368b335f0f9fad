"""What a user may ask for, and how a config is read and written."""
