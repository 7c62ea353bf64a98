"""How much faster do more workers make a program, and what limits them?"""
