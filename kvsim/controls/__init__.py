"""How an adaptive rule chooses its alpha while it runs, one small file each; see `kvsim.control`."""
