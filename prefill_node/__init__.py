"""What is special about a node that prefills?"""
