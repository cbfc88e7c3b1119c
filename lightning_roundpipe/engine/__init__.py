"""The engine: runs a schedule of micro-batches over a pool of devices. Knows torch, never Lightning.

What happens, from the outside in: :mod:`runner` (the engine, step after step), :mod:`step` (one step, its segments and
threads), :mod:`microbatch_thread` (the life of one micro-batch), :mod:`microbatch` (one call of a unit, one backward),
:mod:`execution` (the unit itself, between entry and cut). Beside them: :mod:`gate` (whose turn it is), :mod:`barrier`
(where micro-batches meet), :mod:`plans` and :mod:`costs` (what runs where, from what was measured), :mod:`books`
(memory of activations), :mod:`requests` and :mod:`context` (what a step is asked for, and what its micro-batches
share), :mod:`patches`, :mod:`tracing`.

[Note: glossary]
Work
    unit            a module that is run whole, on one device; found in the model by ``weights.units``
    call            one execution of a unit by one micro-batch: its forward and its backward
    position        place of a call in the plan: which unit is expected as which call of a micro-batch
    user code       everything that the model does outside units, between calls
    stage           consecutive positions that run on one device: F (forward), fused (forward, loss and backward), B
    partition       the stages that the positions of a plan were cut into
    action          one stage of one micro-batch
    schedule        for each device its actions, in order
    stage run       consecutive actions of one stage on a device: weights come before it, gradients go after it
    gate            admits micro-batches to devices in the order of the schedule
    barrier         where all micro-batches of a step meet for what concerns the whole batch
    segment         what a micro-batch does from one barrier to the next: one run over a schedule
    off the plan    a call that the plan does not foresee: runs on the device where the micro-batch is
    bubble          the fraction of the time in which devices wait

Tensors, and where they live
    master weights          the parameters of the user's model: host, for good
    low-precision copy      a master in the dtype that autocast casts it to: host, until the master changes
    replica                 a copy of a unit with leaves of its own: device, from the stage run's begin to its end
    weight gradients        ``.grad`` of a replica's leaves, summed over micro-batches: device, then host
    saved inputs            arguments of a call that will be recomputed: host (offloaded), from forward to backward
    kept graph              local graph of a call in the fused stage: device, from forward to backward
    pending gradients       gradients that wait at the inputs of calls: device, until user code is flushed
    loose parameter         a master that user code computes with outside units; its gradient comes by micro-batch

State of a call
    not recorded    no gradient can reach it: nothing is kept
    kept            its local graph waits for the backward
    recomputed      its inputs are saved, its local graph is made again in the backward
    carried         its backward comes in a later segment: recomputed there, whatever it was before
    over            its backward has passed for good: nothing is left but its identity
"""
