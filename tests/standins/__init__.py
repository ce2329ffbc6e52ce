"""Servers in threads that speak the JSON of each engine, around any engine; and one that means harm."""
