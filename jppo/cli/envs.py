"""`jppo envs`."""

import dataclasses

from jppo.config.presets import preset_for


@dataclasses.dataclass(frozen=True)
class Envs:
    """List the environments that `jppo train` knows by name."""

    def run(self) -> int:
        from rich.console import Console
        from rich.table import Table

        from jppo.envs import available
        from jppo.envs.gymnasium import host_env_names
        from jppo.runs.render import DRAWABLE

        on_device, on_host = available(), host_env_names()
        table = Table("environment", "backends", "preset", "`jppo play`")
        table.columns[0].no_wrap, table.columns[0].min_width = True, max(map(len, [*on_device, *on_host]))
        for name in on_device:
            table.add_row(
                name,
                "device, ray" if name in on_host else "device",
                preset_for(name),
                "yes" if name in DRAWABLE else "",
            )
        for name in (name for name in on_host if name not in on_device):
            table.add_row(name, "ray", preset_for(name), "yes")
        Console().print(table)
        print("device: gymnax environments; ray: Gymnasium environments")
        return 0
