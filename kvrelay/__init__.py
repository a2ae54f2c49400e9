"""What does the user type?"""

__version__ = "0.1.0"
