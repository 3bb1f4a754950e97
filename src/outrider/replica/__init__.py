"""One copy of the model and how it steps: recipe, replica, logged scalars. Shared by the runtime and the lab."""
