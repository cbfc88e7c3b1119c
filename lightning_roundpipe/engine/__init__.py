"""The engine: runs a schedule of micro-batches over a pool of devices. Knows torch, never Lightning."""
