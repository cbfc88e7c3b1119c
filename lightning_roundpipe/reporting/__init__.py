"""What a run tells about itself. Knows Lightning and matplotlib.

- :mod:`timeline_callback`, :mod:`tracing`: the user's ways to record steps, and the recording.
- :mod:`summary`: the table at the end of a training.
- :mod:`pictures`: charts of timelines.
- :mod:`host_memory`, :mod:`host_report`: what a training needs on the host, in bytes, and in words.
- :mod:`optimizer_trial`: what an optimizer will keep for its weights.
"""
