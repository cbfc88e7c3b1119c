"""The other processes of this run: *ranks*, each with devices of its own and all of the model.

- :mod:`group`: what ranks tell each other and add up, over ``torch.distributed``.
- :mod:`failures`: how the others learn which rank has failed, and of what.
"""
