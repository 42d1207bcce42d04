"""What a run that was made says of how long things take, and how near a simulation comes to it."""
