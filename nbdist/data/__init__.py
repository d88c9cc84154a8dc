"""Loaders: sharding the index stream, order, tails, where an iteration is, and going on there.

`loader` puts one of four feeds under the user's own DataLoader: `source` (indices, cut up by `plan`), `stream` (no
indices: all ranks read the same), `sharded` (each rank has data of its own), `dispatch` (rank 0 reads). `randomness`,
`numbers` and `sandbox` make order a function of (seed, number of the loader, epoch), `resume` sets where an epoch goes
on, `delivering` brings batches to the user.
"""
