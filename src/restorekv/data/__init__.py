"""`restorekv data`: training data for any model, with the model's own answers."""
