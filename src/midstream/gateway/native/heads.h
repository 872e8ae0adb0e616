// Strict reading of HTTP/1.1 heads in the plain form that nearly all have. Whatever differs in anything is `odd`: it is left
// to the Python path, which knows all forms and says what is wrong with the others. So this code refuses nothing itself.

#ifndef HEADS_H
#define HEADS_H

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

constexpr size_t FIELDS_MAX = 96;
constexpr size_t NAMES_BYTES_MAX = 4096;
constexpr size_t LENGTH_DIGITS_MAX = 15;

struct Field {
    std::string_view name;  // in lower case
    std::string_view value;  // without white space around it
    std::string_view line;  // as it came, with its line end
};

struct Fields {
    Field field[FIELDS_MAX];
    size_t count = 0;
    char names[NAMES_BYTES_MAX];
};

struct Tables {
    unsigned char token[256] = {};  // the lower case of a token's character; 0: none
    bool value[256] = {};
    bool target[256] = {};
    Tables() {
        for (int c = '0'; c <= '9'; c++) token[c] = c;
        for (int c = 'a'; c <= 'z'; c++) token[c] = token[c - 32] = c;
        for (char c : std::string_view("!#$%&'*+-.^_`|~")) token[(unsigned char)c] = c;
        for (int c = 0x20; c < 256; c++) value[c] = c != 0x7f;
        value['\t'] = true;
        for (int c = 0x21; c < 0x7f; c++) target[c] = true;
    }
};
inline const Tables TABLES;

// The lines from `at` to the empty one that ends at `end`. False: odd.
inline bool read_fields(const char *at, const char *end, Fields &fields) {
    fields.count = 0;
    char *name = fields.names, *const names_end = fields.names + NAMES_BYTES_MAX;
    while (end - at > 2) {
        if (fields.count == FIELDS_MAX) return false;
        const char *const start = at;
        char *const name_start = name;
        while (unsigned char lower = TABLES.token[(unsigned char)*at]) {
            if (name == names_end) return false;
            *name++ = (char)lower;
            at++;
        }
        if (name == name_start || *at != ':') return false;
        at++;
        while (*at == ' ' || *at == '\t') at++;
        const char *const value = at;
        while (TABLES.value[(unsigned char)*at]) at++;
        if (at[0] != '\r' || at[1] != '\n') return false;
        const char *value_end = at;
        while (value_end > value && (value_end[-1] == ' ' || value_end[-1] == '\t')) value_end--;
        at += 2;
        fields.field[fields.count++] = {{name_start, (size_t)(name - name_start)},
                                        {value, (size_t)(value_end - value)},
                                        {start, (size_t)(at - start)}};
    }
    return end - at == 2;
}

inline bool same(std::string_view text, std::string_view lower) {
    return text.size() == lower.size() && std::equal(text.begin(), text.end(), lower.begin(), [](char a, char b) {
               return (char)TABLES.token[(unsigned char)a] == b;
           });
}

inline bool read_length(std::string_view digits, uint64_t &length) {
    if (digits.empty() || digits.size() > LENGTH_DIGITS_MAX) return false;
    length = 0;
    for (char c : digits) {
        if (c < '0' || c > '9') return false;
        length = length * 10 + (uint64_t)(c - '0');
    }
    return true;
}

// What a request keeps and loses on its way, and its limits.
struct Rules {
    std::vector<std::string> dropped, let_through;  // names; of those that begin with PRIVATE only some are let through
    size_t head_bytes_max = 0;
    uint64_t body_bytes_max = 0;

    bool forwards(std::string_view name) const {
        if (name.substr(0, PRIVATE.size()) == PRIVATE) return listed(let_through, name);
        return !listed(dropped, name);
    }
    static constexpr std::string_view PRIVATE = "x-midstream-";

  private:
    static bool listed(const std::vector<std::string> &names, std::string_view name) {
        for (const std::string &one : names)
            if (one.size() == name.size() && one[0] == name[0] && one == name) return true;
        return false;
    }
};

struct RequestHead {
    std::string_view target;
    uint64_t length = 0;
    Fields fields;
};

// A POST whose head is `head`, with the empty line that ends it. False: odd, or over a limit.
inline bool read_request(std::string_view head, const Rules &rules, RequestHead &request) {
    constexpr std::string_view METHOD = "POST ", VERSION = " HTTP/1.1\r\n";
    if (head.size() > rules.head_bytes_max || head.substr(0, METHOD.size()) != METHOD) return false;
    const char *const start = head.data() + METHOD.size(), *at = start;
    while (TABLES.target[(unsigned char)*at]) at++;
    request.target = {start, (size_t)(at - start)};
    const char *const end = head.data() + head.size();
    if (request.target.empty() || *start != '/') return false;
    if ((size_t)(end - at) < VERSION.size() || std::string_view(at, VERSION.size()) != VERSION) return false;
    if (!read_fields(at + VERSION.size(), end, request.fields)) return false;
    int hosts = 0, lengths = 0;
    for (size_t i = 0; i < request.fields.count; i++) {
        const Field &field = request.fields.field[i];
        switch (field.name.size()) {
            case 4:
                hosts += field.name == "host";
                break;
            case 6:
                if (field.name == "expect") return false;
                break;
            case 7:
                if (field.name == "upgrade") return false;
                break;
            case 10:
                if (field.name == "connection" && !same(field.value, "keep-alive")) return false;
                break;
            case 14:
                if (field.name == "content-length" && (lengths++ || !read_length(field.value, request.length))) return false;
                break;
            case 16:
                if (field.name == "content-encoding") return false;
                break;
            case 17:
                if (field.name == "transfer-encoding") return false;
                break;
        }
    }
    return hosts == 1 && lengths == 1 && request.length <= rules.body_bytes_max;
}

struct ResponseHead {
    bool chunked = false, events = false;
    uint64_t length = 0;
    Fields fields;
};

// A response of status 200 after which the connection stays open. False: anything else.
inline bool read_response(std::string_view head, ResponseHead &response) {
    constexpr std::string_view STATUS = "HTTP/1.1 200 ";
    if (head.substr(0, STATUS.size()) != STATUS) return false;
    const char *at = head.data() + STATUS.size();
    while (TABLES.value[(unsigned char)*at]) at++;
    if (at[0] != '\r' || at[1] != '\n') return false;
    if (!read_fields(at + 2, head.data() + head.size(), response.fields)) return false;
    int lengths = 0, codings = 0;
    response.events = false;
    for (size_t i = 0; i < response.fields.count; i++) {
        const Field &field = response.fields.field[i];
        if (field.name == "content-length") {
            if (lengths++ || !read_length(field.value, response.length)) return false;
        } else if (field.name == "transfer-encoding") {
            if (codings++ || !same(field.value, "chunked")) return false;
        } else if (field.name == "connection") {
            if (!same(field.value, "keep-alive")) return false;
        } else if (field.name == "upgrade") {
            return false;
        } else if (field.name == "content-type") {
            response.events = field.value.substr(0, 17) == "text/event-stream";
        }
    }
    response.chunked = codings == 1;
    return lengths + codings == 1;
}

#endif
