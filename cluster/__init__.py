"""Which processes run where?"""
