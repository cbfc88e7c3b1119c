"""Devices: the one seam between the engine and the hardware.

- :mod:`devices`, :mod:`pool`: the interface, and the devices of a run.
- :mod:`memory`: the books on a device's memory.
- :mod:`transfer`, :mod:`chunks`: lanes to and from a device, and the pieces that travel.
- :mod:`offload`: activations on the host.
- :mod:`virtual`: devices on the host's cores.
- :mod:`gpu`, :mod:`gpu_lanes`: devices on GPUs, and their copy streams.
- :mod:`gpu_driver`: what they ask of torch.
- :mod:`pinned`, :mod:`host_buffers`: page-locked memory of the host, in place and in buffers.
- :mod:`links`: how fast copies travel.
- :mod:`runs`: what is noted about each run of a unit.
"""
