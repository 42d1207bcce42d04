"""What calls cost: seconds and bytes, from shapes, devices and constants. Pure."""
