// Attention of packed query tokens over the paged KV cache, and the norms, rotations and cache writes just before it.
//
// The cache keeps 16 tokens in a group: keys as [group][kv_head][units of head_dim][16 tokens], values as
// [group][kv_head][units of tokens][head_dim], both ready to be multiplied. A query looks at its keys in tiles of 64, counted
// from position 0. So its result does not depend on its chunk, its batch or the place of its blocks.
#pragma once

#include <vector>

#include "linear.h"

constexpr int GROUP = LANES;
constexpr int TILE = 4 * GROUP;
constexpr int HEADS_AT_ONCE = 8;

template <class T>
struct Cache {
  uint32_t *keys, *values;
  int64_t kv_heads, head_dim;
  int64_t key_units() const { return head_dim / T::PER_UNIT; }
  const vu *key_group(int64_t group, int64_t head) const {
    return (const vu *)keys + (group * kv_heads + head) * key_units();
  }
  const uint32_t *value_group(int64_t group, int64_t head) const {
    return values + (group * kv_heads + head) * (GROUP / T::PER_UNIT) * head_dim;
  }
  void write(int64_t slot, int64_t head, const typename T::elem *key, const typename T::elem *value) const {
    typedef typename T::elem elem;
    const int64_t group = slot / GROUP, lane = slot % GROUP, per = T::PER_UNIT;
    uint32_t *k = (uint32_t *)key_group(group, head) + lane;
    for (int64_t u = 0; u < key_units(); ++u) std::memcpy(k + u * GROUP, key + u * per, 4);
    elem *v = (elem *)(value_group(group, head) + lane / per * head_dim) + lane % per;
    for (int64_t d = 0; d < head_dim; ++d) v[d * per] = value[d];
  }
};

// qkv: [m, (heads + 2 kv_heads) * head_dim]; queries are changed in place. q_norm, k_norm: [head_dim] or null.
// norm_size: elements of a head in the model; the others are zero. cos, sin: [positions, rotary / 2].
// rotary: leading dimensions of a head that are rotated. positions, slots: [m].
template <class T>
struct Prepare {
  typedef typename T::elem elem;
  elem *qkv;
  int64_t m, heads;
  const float *q_norm, *k_norm;
  int64_t norm_size;
  float eps;
  const float *cos, *sin;
  int64_t rotary;
  const int64_t *positions, *slots;
  Cache<T> cache;

  // count: the divisor of the sum of squares.
  static void norm(const elem *x, const float *weight, int64_t size, int64_t count, float eps, elem *out) {
    vf squares = {};
    for (int64_t i = 0; i < size; i += LANES) {
      const vf v = T::load16(x + i);
      squares += v * v;
    }
    const float scale = 1.0f / std::sqrt(sum_lanes(squares) / (float)count + eps);
    for (int64_t i = 0; i < size; i += LANES)
      T::store16(out + i, T::rounded(T::load16(x + i) * scale) * load(weight + i));
  }

  void rotate(elem *x, int64_t position) const {
    const int64_t half = rotary / 2;
    const float *c = cos + position * half, *s = sin + position * half;
    for (int64_t i = 0; i < half; i += LANES) {
      const vf a = T::load16(x + i), b = T::load16(x + half + i), ci = load(c + i), si = load(s + i);
      // Each first product may be fused with the sum.
      const vf ac = T::rounded(a * ci), bs = T::rounded(b * si), bc = T::rounded(b * ci), as = T::rounded(a * si);
      T::store16(x + i, ac - bs);
      T::store16(x + half + i, bc + as);
    }
  }

  void run(int64_t row) const {
    const int64_t dim = cache.head_dim, kv = cache.kv_heads;
    elem *q = qkv + row * (heads + 2 * kv) * dim, *k = q + heads * dim, *v = k + kv * dim;
    for (int64_t h = 0; h < heads + kv; ++h) {
      elem *x = q + h * dim;
      const float *weight = h < heads ? q_norm : k_norm;
      if (weight) norm(x, weight, dim, norm_size, eps, x);
      rotate(x, positions[row]);
    }
    for (int64_t h = 0; h < kv; ++h) cache.write(slots[row], h, k + h * dim, v + h * dim);
  }
};

template <class T>
static void prepare(const Prepare<T> &op, int threads) {
  const double elements = (double)op.m * (op.heads + 2 * op.cache.kv_heads) * op.cache.head_dim;
  parallel(threads, op.m, 8 * elements, [&op](int64_t i) { op.run(i); });
}

// `count` (query, head) pairs of one KV head, numbered from `first` within the span.
struct Task {
  const int32_t *span;
  int64_t kv_head, first, count;
};

// q: [m, ldq]. out: [m, heads * head_dim]. spans: [sequences, 4], first row, rows, position of the first row, offset of its table.
// tables: groups of 16 slots, in order of position. window: positions that a query sees, its own included; 0 for all before it.
template <class T>
struct Attention {
  typedef typename T::elem elem;
  const elem *q;
  int64_t ldq;
  elem *out;
  int64_t heads;
  Cache<T> cache;
  const int32_t *spans;
  const int32_t *tables;
  int64_t window;
  float scale;

  // Of R rows, those that are computed at once: about equal shares that the registers hold.
  static constexpr int share(int rows) { return (rows + (rows - 1) / HELD) / ((rows - 1) / HELD + 1); }

  // Where a tile's groups lie.
  struct Tile {
    const vu *keys[4];
    const uint32_t *values[4];
  };

  // Groups behind position `last` are not there: the first one stands for them.
  void find(const int32_t *table, int64_t kv_head, int64_t tile, int64_t last, Tile &found) const {
    for (int j = 0; j < 4; ++j) {
      const int64_t at = tile + j * GROUP <= last ? tile / GROUP + j : tile / GROUP;
      found.keys[j] = cache.key_group(table[at], kv_head);
      found.values[j] = cache.value_group(table[at], kv_head);
    }
  }

  // The first tile that any of a task's rows sees, and the last position.
  int64_t start(const Task &task) const {
    const int64_t position = task.span[2] + task.first / (heads / cache.kv_heads);
    return window ? std::max<int64_t>(0, position - window + 1) / TILE * TILE : 0;
  }
  int64_t last(const Task &task) const {
    return task.span[2] + (task.first + task.count - 1) / (heads / cache.kv_heads);
  }

  // Blocks lie anywhere, so the processor cannot predict the addresses of the next tile. Few rows are done with a tile before
  // the next one has come: with each vector that they take, they fetch its like in the next tile, be it another task's. For more
  // rows `fetch` costs less.
  static constexpr int FEW = 4;

  // The scores of R rows and one tile.
  template <int R, bool FETCH>
  void score(const left *const *query, const Tile &tile, const Tile &next, float (*s)[TILE]) const {
    constexpr int ROWS = share(R), AT_ONCE = R <= 4 && 4 * ROWS <= HELD ? 4 : 2 * ROWS <= HELD ? 2 : 1;
    for (int g = 0; g < 4; g += AT_ONCE) {
      vf c[AT_ONCE][ROWS] = {};
      const vu *const *keys = tile.keys + g, *const *soon = next.keys + g;
      add_products<T, ROWS, AT_ONCE>(query, cache.key_units(), [=](int64_t u, int j) {
        if constexpr (FETCH) __builtin_prefetch(soon[j] + u, 0, 3);
        return keys[j][u];
      }, c);
#pragma GCC unroll 4
      for (int j = 0; j < AT_ONCE; ++j)
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) store(s[r] + (g + j) * GROUP, c[j][r] * scale);
    }
    if constexpr (R > ROWS) score<R - ROWS, false>(query + ROWS, tile, next, s + ROWS);
  }

  // Turns the scores of one tile and row into weights in `p`, and updates the running maximum and sum. Returns the factor by
  // which earlier output shrinks.
  float weigh(const float *s, int64_t tile, int64_t position, float &top, vf &total, left *p) const {
    static const int32_t numbers[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vi counting;
    std::memcpy(&counting, numbers, sizeof counting);
    const int64_t oldest = window ? position - window : -1;
    vf v[4];
    for (int j = 0; j < 4; ++j) v[j] = load(s + j * GROUP);
    if (tile + TILE - 1 > position || tile <= oldest)
      for (int j = 0; j < 4; ++j) {
        const vi at = counting + (int32_t)(tile + j * GROUP);
        const vi seen = (at <= (int32_t)position) & (at > (int32_t)oldest);
        v[j] = select(seen, v[j], splat(-INFINITY));
      }
    vf best = splat(-INFINITY);
    for (int j = 0; j < 4; ++j) best = max_of(best, v[j]);
    const float highest = std::max(top, max_lane(best));
    if (highest == -INFINITY) {
      std::memset(p, 0, TILE / T::PER_UNIT * LEFT_PER_UNIT<T> * sizeof(left));
      return 1.0f;
    }
    const float shrink = highest == top ? 1.0f : exp_one(top - highest);
    if (shrink != 1.0f) total *= shrink;
    for (int j = 0; j < 4; ++j) {
      const vf weight = exp_below(v[j] - highest);
      total += weight;
      put_left<T>(p, j, weight);
    }
    top = highest;
    return shrink;
  }

  // o += p V over the first `tokens` tokens of a tile.
  template <int R, bool FETCH>
  void gather(const left *const *p, const Tile &tile, const Tile &next, int64_t tokens, float *o) const {
    constexpr int ROWS = share(R), AT_ONCE = 2 * ROWS <= HELD ? 2 : 1;
    const int64_t dim = cache.head_dim;
    for (int64_t d = 0; d < dim;)
      if (d + (AT_ONCE - 1) * LANES < dim)
        d += gather_at<ROWS, AT_ONCE, FETCH>(p, tile, next, tokens, d, o);
      else
        d += gather_at<ROWS, 1, FETCH>(p, tile, next, tokens, d, o);
    if constexpr (R > ROWS) gather<R - ROWS, false>(p + ROWS, tile, next, tokens, o + ROWS * dim);
  }

  // The N vectors of the output from dimension d on. Returns how many dimensions these are.
  template <int R, int N, bool FETCH>
  int64_t gather_at(const left *const *p, const Tile &tile, const Tile &next, int64_t tokens, int64_t d, float *o) const {
    constexpr int PER_GROUP = GROUP / T::PER_UNIT;
    const int64_t dim = cache.head_dim, whole = tokens / T::PER_UNIT;
    const uint32_t *const *values = tile.values, *const *soon = next.values;
    const auto value = [=](int64_t u, int j) {
      const int64_t at = u % PER_GROUP * dim + d + j * LANES;
      if constexpr (FETCH) __builtin_prefetch(soon[u / PER_GROUP] + at, 0, 3);
      return *(const vu *)(values[u / PER_GROUP] + at);
    };
    vf c[N][R];
    for (int j = 0; j < N; ++j)
      for (int r = 0; r < R; ++r) c[j][r] = load(o + r * dim + d + j * LANES);
    add_products<T, R, N>(p, whole, value, c);
    if (whole * T::PER_UNIT < tokens) {
      // The second token of the last pair is not there yet.
      const left *last[R];
      for (int r = 0; r < R; ++r) last[r] = p[r] + whole * LEFT_PER_UNIT<T>;
      add_products<T, R, N>(last, 1, [=](int64_t, int j) { return value(whole, j) & 0xFFFFu; }, c);
    }
    for (int j = 0; j < N; ++j)
      for (int r = 0; r < R; ++r) store(o + r * dim + d + j * LANES, c[j][r]);
    return N * LANES;
  }

  void fetch(const int32_t *table, int64_t groups, int64_t kv_head) const {
    const int64_t bytes = GROUP * cache.head_dim * (int64_t)sizeof(elem);
    for (int64_t g = 0; g < groups; ++g) {
      const char *key = (const char *)cache.key_group(table[g], kv_head);
      const char *value = (const char *)cache.value_group(table[g], kv_head);
      for (int64_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(key + i, 0, 3);
        __builtin_prefetch(value + i, 0, 3);
      }
    }
  }

  // A task of R pairs. after: the task that is likely the next of this thread, or null.
  template <int R>
  void rows(const Task &task, const Task *after) const {
    constexpr bool FETCH = R <= FEW;
    const int64_t dim = cache.head_dim, group = heads / cache.kv_heads, kv_head = task.kv_head, first = task.first;
    const int32_t *span = task.span, *table = tables + span[3];
    const uint32_t *query[R];
    elem *to[R];
    int64_t position[R];
    for (int r = 0; r < R; ++r) {
      const int64_t row = span[0] + (first + r) / group, head = kv_head * group + (first + r) % group;
      query[r] = (const uint32_t *)(q + row * ldq + head * dim);
      to[r] = out + (row * heads + head) * dim;
      position[r] = span[2] + (first + r) / group;
    }
    alignas(64) float o[R * 256] = {}, s[R][TILE];
    Rows<T, R> left_query;
    left_query.take(query, 0, cache.key_units());
    alignas(64) left p[R][TILE / T::PER_UNIT * LEFT_PER_UNIT<T>];
    const left *weights[R];
    for (int r = 0; r < R; ++r) weights[r] = p[r];
    float top[R];
    vf total[R] = {};
    for (int r = 0; r < R; ++r) top[r] = -INFINITY;
    const int64_t last = this->last(task);
    Tile tiles[2];
    int now = 0;
    find(table, kv_head, start(task), last, tiles[0]);
    for (int64_t tile = start(task); tile <= last; tile += TILE) {
      const Tile &here = tiles[now];
      if (tile + TILE <= last) {
        now ^= 1;
        find(table, kv_head, tile + TILE, last, tiles[now]);
        if (!FETCH) fetch(table + tile / GROUP + 4, std::min<int64_t>(4, (last - tile) / GROUP - 3), kv_head);
      } else if (FETCH && after) {
        now ^= 1;
        find(tables + after->span[3], after->kv_head, start(*after), this->last(*after), tiles[now]);
      }
      const Tile &next = tiles[now];
      score<R, FETCH>(left_query.at, here, next, s);
      for (int r = 0; r < R; ++r) {
        const float shrink = weigh(s[r], tile, position[r], top[r], total[r], p[r]);
        if (shrink != 1.0f)
          for (int64_t d = 0; d < dim; d += LANES) store(o + r * dim + d, load(o + r * dim + d) * shrink);
      }
      gather<R, FETCH>(weights, here, next, std::min<int64_t>(TILE, last - tile + 1), o);
    }
    for (int r = 0; r < R; ++r) {
      const float sum = sum_lanes(total[r]);
      for (int64_t d = 0; d < dim; d += LANES) T::store16(to[r] + d, load(o + r * dim + d) / sum);
    }
  }

  void run(const Task &task, const Task *after) const {
    switch (task.count) {
#define CASE(R) \
  case R: return rows<R>(task, after);
      CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
      default: break;
    }
  }
};

template <class T>
static void attention(const Attention<T> &op, int64_t spans, int threads) {
  static thread_local std::vector<Task> tasks;
  tasks.clear();
  const int64_t kv_heads = op.cache.kv_heads, group = op.heads / kv_heads;
  double work = 0;
  for (int64_t i = 0; i < spans; ++i) {
    const int32_t *span = op.spans + 4 * i;
    const int64_t pairs = span[1] * group;
    work += (double)span[1] * (span[2] + span[1]) * op.heads * op.cache.head_dim;
    for (int64_t head = 0; head < kv_heads; ++head)
      for (int64_t first = 0; first < pairs; first += HEADS_AT_ONCE)
        tasks.push_back({span, head, first, std::min<int64_t>(HEADS_AT_ONCE, pairs - first)});
  }
  const Task *all = tasks.data();
  const int64_t count = (int64_t)tasks.size();
  parallel(threads, count, work, [&op, all, count](int64_t i) { op.run(all[i], i + 1 < count ? all + i + 1 : nullptr); });
}
