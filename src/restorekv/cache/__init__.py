"""The KV cache: rows of the context of unlike lengths per head, what follows them, and how they are held."""
