"""Episodes whose policy is a person or a function, in the driver that trains models."""
