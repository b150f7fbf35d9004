"""Training the restore pass by self-distillation from the full cache."""
