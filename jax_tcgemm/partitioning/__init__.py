"""How a product is divided among the devices of a sharded program."""
