"""The other processes of this run: *ranks*, each with devices of its own and all of the model.

- :mod:`group`: what ranks tell each other and add up, over ``torch.distributed``.
- :mod:`sums`: how gradients travel, on the host or by way of devices.
- :mod:`environment`: which rank this process is, how ranks meet, and which devices are theirs.
- :mod:`failures`: how the others learn which rank has failed, and of what.
- :mod:`buckets`, :mod:`reduction`: gradients of all ranks, added up while each one's backward goes on.
- :mod:`model`: weights and buffers of rank 0, which all ranks begin with.
"""
