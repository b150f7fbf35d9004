"""Every contact with transformers: loading a model, the prompt, the prefill, what a pass shows, attention."""
