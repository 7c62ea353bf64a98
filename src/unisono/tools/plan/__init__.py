"""How much faster do more workers make a program, and what keeps them from more?"""
