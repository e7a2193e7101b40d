import typer

app = typer.Typer()


@app.command()
def attention() -> None: ...
