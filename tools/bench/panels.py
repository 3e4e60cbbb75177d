"""What tools/bench/curve draws: memory against predicted time, a panel for each configuration, in one SVG. Both axes are
logarithmic. A result is a dict, as that program and tools/bench/checkmate write it as JSON:

    name      what the panel is called
    whole     with everything resident: bytes, seconds
    curve     plans under budgets, the smallest first: budget, bytes, seconds
    simple    simpler settings: name, bytes, seconds; away: whether what may rest elsewhere does
    optimal   where there is an exact solution: budget, seconds, bound (no plan is faster), proved

A budget below which a plan is slower than every simpler setting by far is not drawn but told in words."""
import math

GIB = 1 << 30
BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#009e73"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 480, 340, 62, 84, 44, 44
STYLE = ("<style>text{font:12px system-ui,sans-serif;fill:#1a1a1a;paint-order:stroke;stroke:#fff;stroke-width:2px}"
         ".title{font-weight:600;font-size:13px}.soft{fill:#666}.axis{stroke:#ddd}"
         ".blue{fill:#0072b2}.green{fill:#00795a}.orange{fill:#b34e00}</style>")


def ticks(low, high, powers):
    """Round numbers between two, about five: of one step where the two are near, else powers of 2, or 1, 2, 5."""
    if high / low < 4:
        step = 10 ** math.floor(math.log10((high - low) / 4))
        step = next(step * f for f in (1, 2, 2.5, 4, 5, 8, 10) if (high - low) / (step * f) <= 6)
        return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    if powers:
        return [2.0 ** i for i in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
    return [f * 10.0 ** i for i in range(-9, 9) for f in (1, 2, 5) if low <= f * 10.0 ** i <= high]


def duration(seconds):
    if seconds >= 0.1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.3g} µs"


class Panel:
    def __init__(self, result, dx, dy):
        self.result, self.dx, self.dy, self.out = result, dx, dy, []
        curve, simple, optimal = result["curve"], result["simple"], result.get("optimal", [])
        xs = [one["budget"] for one in curve + optimal] + [one["bytes"] for one in simple]
        ys = [one["seconds"] for one in curve + optimal + simple]
        most = max(one["seconds"] for one in simple + [result["whole"]])
        self.y0, self.y1 = min(ys), min(max(ys), 1.15 * most)
        self.y0, self.y1 = self.y0 / (self.y1 / self.y0) ** 0.06, self.y1 * (self.y1 / self.y0) ** 0.06
        self.x0, self.x1 = min(xs), max(xs)
        self.x0, self.x1 = self.x0 / (self.x1 / self.x0) ** 0.04, self.x1 * (self.x1 / self.x0) ** 0.02
        self.unit, self.unit_name = (GIB, "GiB") if self.x1 > 2 * GIB else (1 << 20, "MiB")

    def x(self, at):
        share = math.log(at / self.x0) / math.log(self.x1 / self.x0)
        return self.dx + LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, at):
        share = math.log(min(at, self.y1) / self.y0) / math.log(self.y1 / self.y0)
        return self.dy + TOP + (1 - share) * (HEIGHT - TOP - BOTTOM)

    def text(self, x, y, words, kind="", anchor="start"):
        words = words.replace("&", "&amp;").replace("<", "&lt;")
        self.out.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>')

    def axes(self):
        bottom, right = self.dy + HEIGHT - BOTTOM, self.dx + WIDTH - RIGHT
        self.text(self.dx + 12, self.dy + 22, self.result["name"], "title")
        for tick in ticks(self.x0 / self.unit, self.x1 / self.unit, True):
            at = self.x(tick * self.unit)
            self.out.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{self.dy + TOP}" y2="{bottom}"/>')
            self.text(at, bottom + 17, f"{tick:g}", "soft", "middle")
        self.text(right + 8, bottom + 17, self.unit_name, "soft")
        scale, name = (1, "s") if self.y1 >= 0.1 else (1e3, "ms") if self.y1 >= 1e-4 else (1e6, "µs")
        for tick in ticks(self.y0 * scale, self.y1 * scale, False):
            at = self.y(tick / scale)
            self.out.append(f'<line class="axis" x1="{self.dx + LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
            self.text(self.dx + LEFT - 6, at + 4, f"{tick:.6g} {name}", "soft", "end")

    def circle(self, x, y, colour, hollow, title):
        fill = f'fill="#ffffff" stroke="{colour}" stroke-width="1.5"' if hollow else f'fill="{colour}"'
        self.out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {fill}><title>{title}</title></circle>')

    def plans(self):
        """In steps: a plan holds for every larger budget, until another is faster."""
        curve = self.result["curve"]
        seen = [plan for plan in curve if plan["seconds"] <= self.y1] or curve[-1:]
        path = f"M{self.x(seen[0]['budget']):.1f} {self.y(seen[0]['seconds']):.1f}"
        if seen[0] is not curve[0]:
            path = f"M{self.x(seen[0]['budget']):.1f} {self.dy + TOP}V{self.y(seen[0]['seconds']):.1f}"
            lower = (plan for plan in seen if self.y(plan["seconds"]) > self.dy + TOP + 24)
            free = next(lower, seen[-1])  # of the line
            self.text(self.x(free["budget"]) + 8, self.dy + TOP + 10,
                      f"{duration(curve[0]['seconds'])} in {curve[0]['budget'] / self.unit:.4g} {self.unit_name}",
                      "blue")
        best = seen[0]["seconds"]
        for plan in seen[1:]:
            best = min(best, plan["seconds"])
            path += f"H{self.x(plan['budget']):.1f}V{self.y(best):.1f}"
        self.out.append(f'<path d="{path}" fill="none" stroke="{BLUE}" stroke-width="2"/>')
        self.text(self.x(seen[-1]["budget"]) + 7, self.y(best) + 4, "Strata", "blue")

    def points(self):
        for one in self.result["simple"]:
            x, y = self.x(one["bytes"]), self.y(one["seconds"])
            away = ", all elsewhere that may be" if one.get("away") else ""
            title = f'{one["name"]}{away}: {one["bytes"] / self.unit:.2f} {self.unit_name}, {duration(one["seconds"])}'
            self.circle(x, y, ORANGE, one.get("away"), title)
            if one["name"] in ("blocks", "selective"):
                if x > self.dx + (LEFT + WIDTH - RIGHT) / 2:
                    self.text(x - 8, y + (14 if one["name"] == "selective" else -4), one["name"], "orange", "end")
                else:
                    right, below = (6, 17) if one.get("away") else (14, 9)
                    self.text(x + right, y + below, one["name"], "orange")
        for one in self.result.get("optimal", []):
            x, y = self.x(one["budget"]), self.y(one["seconds"])
            proved = "the optimum" if one["proved"] else f'at least {duration(one["bound"])}'
            self.circle(x, y, GREEN, not one["proved"], f'Checkmate: {duration(one["seconds"])}, {proved}')

    def svg(self):
        self.axes()
        self.plans()
        self.points()
        return "\n".join(self.out)


def picture(results, title):
    columns = min(2, len(results))
    rows = math.ceil(len(results) / columns)
    width, height = columns * WIDTH, 64 + rows * HEIGHT
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
           f'role="img">', STYLE, '<rect width="100%" height="100%" fill="#ffffff"/>',
           f'<text class="title" x="12" y="22">{title}</text>']
    legend, x = [("Strata, under a budget", BLUE, "line"), ("blocks, every k-th, selective", ORANGE, "")], 12
    if any(one.get("away") for result in results for one in result["simple"]):
        legend.append(("the same, elsewhere what may be", ORANGE, "hollow"))
    if any(result.get("optimal") for result in results):
        legend.append(("Checkmate's optimum; hollow: not proved", GREEN, ""))
    for words, colour, form in legend:
        if form == "line":
            out.append(f'<path d="M{x} 42H{x + 16}" stroke="{colour}" stroke-width="2"/>')
        else:
            fill = f'fill="#ffffff" stroke="{colour}" stroke-width="1.5"' if form else f'fill="{colour}"'
            out.append(f'<circle cx="{x + 8}" cy="42" r="4" {fill}/>')
        out.append(f'<text x="{x + 22}" y="46">{words}</text>')
        x += 34 + 6.5 * len(words)
    for i, result in enumerate(results):
        out.append(Panel(result, i % columns * WIDTH, 56 + i // columns * HEIGHT).svg())
    return "\n".join(out) + "\n</svg>\n"
