"""Loaders: sharding the index stream, order, tails, where an iteration is.

`plan` says which samples a rank takes at each step, `stream` does the same for datasets without indices, `loader`
puts either under the user's own DataLoader, `randomness` makes order a function of (seed, epoch), `move` brings
batches to a device.
"""
