"""How does HTTP become a request?"""
