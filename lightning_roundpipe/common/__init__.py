"""What every part may use: errors, fingerprints and sizes of tensors, nested containers, autograd graphs.

Imports torch alone.
"""
