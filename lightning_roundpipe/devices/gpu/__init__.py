"""Devices on GPUs, and on whatever torch calls an accelerator.

- :mod:`device`, :mod:`lanes`: a device on a GPU, and its copy streams.
- :mod:`driver`, :mod:`cuda`: what they ask of torch; what CUDA alone has.
- :mod:`pinned`, :mod:`host_buffers`: page-locked memory of the host, in place and in buffers.
"""
