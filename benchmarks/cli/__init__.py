"""The flags of every benchmark."""
