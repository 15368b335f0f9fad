"""An address that users wrote down: mis_plugins.metrics.docs holds what stood here."""

from mis_plugins.metrics.docs import document

if __name__ == "__main__":
    print(document(), end="")
