"""How the gradients of all workers become one sum, and an update reaches all workers."""
