"""How do the gradients of all workers become one sum, and an update everybody's?"""
