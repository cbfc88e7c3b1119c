"""Weights: from masters on the host to replicas on devices, and their gradients home."""
