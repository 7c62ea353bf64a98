"""Who is where, and who waits for whom? Looks at processes from outside and says it in words."""
