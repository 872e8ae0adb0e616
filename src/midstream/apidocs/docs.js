// Shows the document of this server's HTTP API. Always holds: nothing is asked of another host, and no key is kept.
"use strict";

SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#docs",
  deepLinking: true,
  defaultModelsExpandDepth: 0,
  docExpansion: "list",
  filter: true,
  persistAuthorization: false,
  validatorUrl: null,
});
