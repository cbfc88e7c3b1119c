"""From a batch to weighted micro-batches, and from their results to those of the batch.

- :mod:`nodes`, :mod:`reading`, :mod:`loaders`: which parts of a batch hold rows or samples, and what a loader tells of
  it.
- :mod:`counted`, :mod:`graphs`: parts that have rows of their own for each sample, and batches of graphs.
- :mod:`microbatches`, :mod:`packed`: cutting it, along rows or between packed sequences.
- :mod:`loss_weight`, :mod:`rank_shares`, :mod:`splitting`: what each micro-batch counts, and the batch of each rank.
- :mod:`merging`, :mod:`changes`: results put together again; what steps do to micro-batches, done to the batch.
"""
