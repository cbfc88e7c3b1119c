"""The first half hour on a GPU: ``python -m benchmarks.gpu``, or ``make gpu``. README.md has what to expect, and why.

    stage     asks                                                            module
    facts     how fast are page-locks, copies, products, the host's memory     facts
    tests     does tests/gpu pass                                             suite
    late      does it pass when kernels or copies are made late               suite
    full      training all of 3.4 billion weights, beside other ways to do it  full
    lora      adapters on 13 billion frozen weights                           full
    compiled  a model that would fit: units as they are, compiled, resident   compiled

A stage is a list of steps (:class:`results.Step`). What a step finds is written at once, so that a run that is killed
leaves what it has measured, and the next one goes on there. Trainings run in processes of their own (:mod:`training`
starts them, :mod:`measuring` is what they do), so that one that fails or hangs ends nothing else.
"""
