"""What happens in a step around the engine; :mod:`run` puts it together, :mod:`user_step` is what micro-batches call.

- :mod:`log_merging`, :mod:`metrics`: what micro-batches log, once and with the value of the whole batch.
- :mod:`loss`, :mod:`manual`: the loss with the gradients behind it; manual optimization.
- :mod:`whole_batch`: the rows of all micro-batches, for losses over the whole batch.
- :mod:`ranks`: training steps as a part of those of all ranks.
- :mod:`retry`, :mod:`step_state`: a step that the devices could not finish is put back, and run again.
- :mod:`misuse`, :mod:`hints`, :mod:`notices`: mistakes that are refused, what users should know, said once per run.
- :mod:`modules`: the modules that steps treat in a way of their own.
"""
