"""`restorekv data`: the paper's training mixture for any model, or a freely licensed one, with its answers."""
