pytest_plugins = ["tdcopier.sim.pytest_plugin"]
