"""How are this step's tokens computed?"""
