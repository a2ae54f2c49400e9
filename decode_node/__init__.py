"""What is special about a node that decodes?"""
