"""User code outside units, run as if each micro-batch were alone.

- :mod:`lock`, :mod:`running_units`: one thread at a time, and what each micro-batch writes on modules; how many units
  run.
- :mod:`collected_lists`, :mod:`hook_state`: lists and dicts that micro-batches fill, on modules and in hooks.
- :mod:`functional_calls`: weights that are put in the place of parameters for one call.
- :mod:`implicit_transfers`, :mod:`moves`: operands on several devices, and how they come together.
- :mod:`places`, :mod:`gpu_draws`: on which of them it is; random numbers there.
- :mod:`loose_parameters`, :mod:`loose_gradients`: parameters that user code uses itself.
- :mod:`key_value_caches`: caches of generation that follow their layers.
- :mod:`generators`: random numbers of the process, as each micro-batch finds them.
- :mod:`outputs`: what leaves a step, and numbers that it leaves behind.
"""
