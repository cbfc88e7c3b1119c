"""Devices: the one seam between the engine and the hardware.

- :mod:`device`, :mod:`pool`: the interface, and the devices of a run.
- :mod:`memory`: the books on a device's memory.
- :mod:`transfer`, :mod:`chunks`: lanes to and from a device, and the pieces that travel.
- :mod:`offload`: activations on the host.
- :mod:`issue_lock`: one thread at a time gives work to GPUs.
- :mod:`virtual`: devices on the host's cores.
- :mod:`gpu`: devices on GPUs.
- :mod:`links`: how fast copies travel.
"""
