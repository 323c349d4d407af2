"""What a product is: axes, strides, activations and arithmetic. Pure; nothing here is lowered."""
