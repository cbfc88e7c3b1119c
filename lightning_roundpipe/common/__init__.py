"""What every part may use: errors, fingerprints and sizes of tensors, autograd graphs. Imports torch alone."""
