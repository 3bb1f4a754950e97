"""Which sample goes where: permutations, leases from the store, loaders, resident tensors."""
